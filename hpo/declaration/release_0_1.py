"""Takes over the identities of studies that release 0.1.0 began.

That release stored digests of all definitions of the trainer, the search and a bundled study. If they are those of the
release's last state, the study's parts have version 1, whose golden digests are the release's. Any other digest is of
code in between, of which nothing was recorded: it counts as modified.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpo.declaration import behaviour
from hpo.declaration.code_digest import FORM, STUDYS

_AREAS = {
    "trainer": "7519a8dac4f28e81484d4c40513d34a81e71650a1906cd1bfc461db58521b20b",
    "search": "d3b3cf29038554a08838d242f80b9eb115fcb1021c4ad4a4ac41aa23e1a5d1c7",
}
# The digests of the bundled studies' code: stored for a declaration's file, its package, and an import of it.
_CODE = {
    "17d54be44115d157e91b7cbd0f649f09cb5283478350df00e4b80b9ea6acc750",  # atft
    "7e44f8acc2204d597b6517f5b95e4916bed2d9643bff4bdecc1eacced98a9925",
    "f962b4aba87c49e1b36b34dfd60a044089e354e87b9d2f90cd2646c076ec4599",  # atft/train.py
    "dfe723f2519307f677406700999ea44eee6fcf901b2b5b9f243788b2d6edc517",
    "8ffa12ce215513e5a295bb1e33e6a1b773004c6f79b9f33c4b839fd01467b901",  # convnet
    "297eaeed38011b6109866e46ee52eeb03418083bc4dacda51a0c762f4f5cdb96",
    "9caa7629f9d99329ea67395c850a3b3a9e8c326e7b94782ef00781505ecc540d",  # convnet/recipes.py
    "d05a80b0fc1d4eb8025a540917304caf87dc68209c6236b3a5c283bac9c6f91f",
    "7b14f024c3adfb2c57dca25d859ec4c077b73dc769fa000e22b71372361552b3",  # dpo
    "aa8fb4273516be40ef6438027b5661e53e963731cb211d912a418c563d26126d",
    "04b188d51db85fa7ddc7164e137e1f358d6aea84999ab393be91c2e325d6163c",  # gpt
    "ff94ebee3fd86c3a4e0f9089bdccdfb8a456008c3cadae52fffdc15e9652023b",
    "a87e643f12f32ffc9a60f38ee68d6b6b422f2ff84a34842f20b324d9bb0204a3",  # lora
    "a07031bf7cf5edf4702b81af874e5bd8ee9af386dc5419fdf49ff9d84886c001",
    "744d1a3c72be311cfd5215ee3d2ca5b3b23a4a1841691a5e5f6401549ce7e7c3",  # mlp
    "cd8619fccbef70ce4f59ec8dff3a1202fbb56c5b1de4d205465ca8c964574776",
    "c95ad8cd2579ff55fd1fdbda382510b1897fd6f47764d9eb44f9180587f154e3",  # _lm
}


def began(identity: Mapping[str, object]) -> bool:
    """Returns whether release 0.1.0 wrote the identity."""
    return bool(identity.keys() & _AREAS.keys()) and "behaviour" not in identity


def translated(identity: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the identity as this release would have stored it; its own identities unchanged."""
    if not began(identity):
        return identity
    modified = {area: digest for area, known in _AREAS.items() if (digest := identity.get(area)) != FORM + known}
    code = {label: digest for label, digest in identity["code"].items() if _sha256(digest) not in _CODE}
    for label in [label for label, digest in code.items() if digest.startswith(FORM)]:
        modified[f"study {label.removeprefix('studies.')}"] = code.pop(label)
    kept = {key: value for key, value in identity.items() if key not in _AREAS}
    kept |= {"code": code, "behaviour": dict.fromkeys(behaviour.parts(), 1)}
    return kept | ({"modified": modified} if modified else {})


def notice(name: str, versions: Mapping[str, int]) -> str:
    """Returns the sentence about a study that goes on under this release, with the `versions` of its parts."""
    kept = sorted(part for part, number in versions.items() if number < behaviour.version(part))
    rules = f" ({', '.join(kept)} by {'its' if len(kept) == 1 else 'their'} earlier rule)" if kept else ""
    return f"study {name!r} began under release 0.1.0; its parts behave here as they did there{rules}, so it goes on."


def _sha256(digest: str) -> str:
    """Returns the hash that identifies a stored digest of code."""
    return digest.removeprefix(FORM).removeprefix(STUDYS).partition(":")[0]
