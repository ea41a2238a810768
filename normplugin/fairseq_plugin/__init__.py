"""fairseq's side of normplugin, and itself a legal ``--user-dir``.

The absolute import below makes every way in (``--user-dir`` under the name ``fairseq_plugin``,
``import normplugin.fairseq_plugin``, the folders under examples/) end at the same module, so that
everything is registered exactly once.
"""

from normplugin.fairseq_plugin import archs, optim

__all__ = ["archs", "optim"]
