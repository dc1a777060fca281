"""What classes of a user's own are told when they follow an earlier version of a contract."""

from __future__ import annotations

from collections.abc import Mapping


def refuse_old_names(cls: type, contract: type, replaced: Mapping[str, str], where: str) -> None:
    """TypeError where ``cls``, derived from ``contract``, defines names that were ``replaced``.

    ``replaced`` says what each old name is now; ``where`` to read more. What ``contract`` has
    itself does not count.
    """
    bases = [base for base in cls.__mro__ if base not in contract.__mro__]
    own = {name for base in bases for name in vars(base)}
    old = [f"{name} is now {new}" for name, new in replaced.items() if name in own]
    if old:
        raise TypeError(
            f"{cls.__name__} has methods of an older contract: {'; '.join(old)}; see {where}"
        )
