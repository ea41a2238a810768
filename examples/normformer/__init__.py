"""A fairseq --user-dir: importing the plugin registers everything."""

import normplugin.fairseq_plugin  # noqa: F401
