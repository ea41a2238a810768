"""fairseq's side of normplugin, and itself a legal ``--user-dir``.

The absolute import below makes every way in (``--user-dir`` under the name ``fairseq_plugin``,
``import normplugin.fairseq_plugin``, the folders under examples/) end at the same module, so that
everything is registered exactly once.
"""

from normplugin.errors import MissingFrameworkError

try:
    import fairseq  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "fairseq":
        raise
    raise MissingFrameworkError(
        "fairseq: got no such package; the fairseq plugin needs it. "
        "Install it: pip install 'normplugin[fairseq]'."
    ) from None

from normplugin.fairseq_plugin import archs, optim

__all__ = ["archs", "optim"]
