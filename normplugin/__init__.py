"""NormFormer, Peri-LN and the placements around them for fairseq and Megatron-Core.

Importing this package loads neither torch nor a framework: the adapters are imported by the
framework that needs them (``normplugin.fairseq_plugin`` by ``--user-dir``,
``normplugin.megatron_plugin`` by ``--spec``).
"""

__version__ = "0.1.0"
