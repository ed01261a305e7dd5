"""The published versions of a run: handed to the weight plane, and the newest kept to score under.

1. The newest published version is always kept, and `keep` versions in all.
2. A version is immutable: publishing it again gives the same digest, or SEQUENCE_CONFLICT. So it is after a
   restore, too, for the version that was published last: what was saved of it is compared.
3. What is kept is saved and restored with the run, so a run that was restored scores under every version that
   it could score under before. The version that the live weights give is not written: it is cast again.
4. A restored run is a new generation in the store: whoever follows it is told where it stands.

On disk a state grows by at most `keep` casts. In memory a kept version costs nothing while the store holds
it, because both share its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quartet.errors import QuartetError
from quartet.v1 import weights_pb2
from quartet.weights.manifest import build_manifest
from quartet.weights.store import WeightStore
from torch import Tensor

from quartet_trainer.publish import Snapshot, wire_tensors
from quartet_trainer.ranks.alone import Alone, Ranks
from quartet_trainer.ranks.layout import on_host

#: A saved version's file is this and its number.
STEM = "version-"


class Versions:
    """What one run has published."""

    def __init__(
        self,
        run_id: str,
        store: WeightStore,
        keep: int,
        canary: Callable[[Snapshot], weights_pb2.Canary | None] = lambda weights: None,
        adapter_config: str = "",
        ranks: Ranks | None = None,
    ) -> None:
        """`canary` computes what goes into a version's manifest as its canary; `adapter_config` does, too."""
        self._run_id, self._store, self._keep, self._canary = run_id, store, max(1, keep), canary
        self._adapter_config, self._ranks = adapter_config, ranks or Alone()
        self._kept: dict[int, Snapshot] = {}
        self._newest: weights_pb2.WeightManifest | None = None

    @property
    def kept(self) -> Mapping[int, Snapshot]:
        """Weights by version."""
        return self._kept

    @property
    def newest(self) -> int | None:
        """The version published last."""
        return None if self._newest is None else int(self._newest.version)

    def find(self, version: int) -> Snapshot:
        """The weights of a version. Errors: VERSION_UNKNOWN."""
        if version not in self._kept:
            held = ", ".join(map(str, sorted(self._kept))) or "none"
            # Those that are gone are older than those that are held, and nothing goes while there is room.
            gone = len(self._kept) == self._keep and version < min(self._kept)
            why = "is not retained" if gone else "was never published"
            remedy = "raise retain_versions of the run" if gone else "PublishWeights, while the run is at it"
            raise QuartetError(
                "VERSION_UNKNOWN",
                f"version {version} {why} (held: {held}); name one that is held, or {remedy}",
                version=version,
                latest=max(self._kept, default=""),
            )
        return self._kept[version]

    def publish(self, version: int, weights: Snapshot) -> weights_pb2.WeightManifest | None:
        """Make weights a version; None in a rank that does not serve it.

        Errors: SEQUENCE_CONFLICT if it is held with other weights.
        """
        tensors, canary = wire_tensors(weights, self._ranks.first), self._canary(weights)
        manifest = self._ranks.agree(
            lambda: self._store.publish(
                self._run_id, version, tensors, canary=canary, adapter_config=self._adapter_config
            )
        )
        self._newest = manifest
        self._kept[version] = weights
        for old in sorted(self._kept)[: -self._keep]:
            del self._kept[old]
        return manifest

    # -- states

    def meta(self) -> dict[str, Any]:
        """What a state says of the versions."""
        digest = None if self._newest is None else self._newest.digest.hex()
        return {"published_version": self.newest, "published_digest": digest}

    def tensors(self, live_version: int) -> dict[str, Snapshot]:
        """What a state keeps of them, by file stem."""
        return {f"{STEM}{number}": cast for number, cast in self._kept.items() if number != live_version}

    def read(
        self,
        meta: Mapping[str, Any],
        tensors: Mapping[str, Mapping[str, Tensor]],
        live_version: int,
        live: Snapshot,
    ) -> dict[int, Snapshot]:
        """The versions of a state, whose live weights are given. Errors: CHECKSUM_MISMATCH."""
        # Copies: the state's files, which tensors may be views of, are removed while versions are still kept.
        kept: dict[int, Snapshot] = {
            int(stem.removeprefix(STEM)): {name: on_host(one, one.dtype) for name, one in cast.items()}
            for stem, cast in tensors.items()
            if stem.startswith(STEM)
        }
        published = meta["published_version"]
        if published == live_version:
            kept[published] = live
        if published is not None:
            self._check(published, kept[published], meta["published_digest"])
        return kept

    def restore(self, meta: Mapping[str, Any], kept: Mapping[int, Snapshot]) -> None:
        """Stand where a state was taken, with the versions that `read` found in it."""
        published = meta["published_version"]
        self._kept, self._newest = dict(kept), None
        self._store.reopen_run(self._run_id)
        if published is not None:
            self.publish(published, kept[published])

    def _check(self, version: int, weights: Snapshot, saved: str) -> None:
        tensors, config = wire_tensors(weights, self._ranks.first), self._adapter_config

        def compare() -> None:
            digest = build_manifest(self._run_id, version, tensors, adapter_config=config).digest.hex()
            if digest != saved:
                raise QuartetError(
                    "CHECKSUM_MISMATCH",
                    f"version {version} of run {self._run_id} was published with digest {saved}, its saved "
                    f"state gives {digest}; nothing was loaded",
                    what=f"version {version}",
                )

        self._ranks.agree(compare)

    def close(self) -> None:
        """Forget all of it, in the store too."""
        self._kept.clear()
        self._store.close_run(self._run_id)
