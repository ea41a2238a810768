"""The check after every build: the parameters a scheme promises against those that exist.

A feature that is silently dropped is the worst fault a plugin can have; upstream fairseq's
NormFormer flags are one.
"""

from __future__ import annotations

from collections.abc import Mapping

from normplugin.errors import SchemeError


def keep_promises(what: str, scheme: str, promise: Mapping, found: Mapping) -> None:
    """Compare name -> size of the norms and scales of a freshly built module.

    Args:
        what: Which module, for the message.
        scheme: The scheme's name.
        promise: What the scheme promises.
        found: What exists.

    Raises:
        SchemeError: Naming every parameter that is missing, unasked for or misshapen.
    """
    missing = sorted(promise.keys() - found.keys())
    extra = sorted(found.keys() - promise.keys())
    wrong = sorted(n for n in promise.keys() & found.keys() if promise[n] != found[n])
    if missing or extra or wrong:
        raise SchemeError(
            f"scheme {scheme!r}: {what} differs from what the scheme promises; missing {missing}, "
            f"not promised {extra}, wrong shape {wrong}. Report this: an option that changes the "
            "layers is not supported together with it."
        )
