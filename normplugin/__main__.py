"""``python -m normplugin`` is the ``normplugin`` command."""

from normplugin.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
