"""Megatron-Core's side of normplugin: layers, specs, launcher.

    --spec normplugin.megatron_plugin.specs normformer

Importing this package imports nothing of Megatron; its modules do.
"""
