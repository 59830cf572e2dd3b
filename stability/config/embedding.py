"""Spec of `stability.embed`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stability.config.base import Settings
from stability.config.identity import Place
from stability.config.parts import Part, one_part

Mode = Literal["encode", "similarity", "search", "cluster", "export"]
# settings of one mode or several; those of no other mode may be given
OF_MODE = {
    "query": ("similarity", "search"),
    "queries": ("search",),
    "text": ("similarity",),
    "k": ("search",),
    "clusters": ("cluster",),
    "seed": ("cluster",),
    "out": ("encode", "cluster", "export"),
    "input": ("encode", "similarity", "search", "cluster"),
    "data": ("encode", "search", "cluster"),
}


class EmbedSpec(Settings):
    """The settings of `stability.embed`: embeddings of texts by a trained model, and what is asked of them."""

    mode: Mode = Field(
        description="encode: write embeddings; similarity: cosines of pairs; search: nearest texts; cluster: k-means; "
        "export: a folder of sentence-transformers",
    )
    ckpt: Annotated[str | None, Place()] = Field(
        default=None, min_length=1, description="a run's folder, a checkpoint's, or that of a study with one run"
    )
    dir: Annotated[str | None, Place()] = Field(
        default=None, min_length=1, description="an exported folder, or any folder of sentence-transformers"
    )
    plugins: tuple[str, ...] = Field(default=(), description="modules of your own that the run was trained with")
    input: Annotated[str | None, Place()] = Field(
        default=None,
        min_length=1,
        description="UTF-8 file with a text per line (similarity: two texts with a tab between)",
    )
    data: Annotated[Part, one_part("data")] | None = Field(
        default=None, description="sentence data whose second sentences are the texts, instead of input"
    )
    query: Annotated[str | None, Place()] = Field(
        default=None, min_length=1, description="text to search for, or to compare with text (similarity)"
    )
    queries: Annotated[str | None, Place()] = Field(
        default=None, min_length=1, description="UTF-8 file with a query per line (search)"
    )
    text: Annotated[str | None, Place()] = Field(
        default=None, min_length=1, description="text to compare with query (similarity)"
    )
    k: int = Field(default=5, ge=1, le=1000, description="texts found for each query (search)")
    clusters: int = Field(default=8, ge=2, le=10_000, description="number of clusters (cluster)")
    seed: int = Field(default=0, ge=0, description="seed of the clusters' starts (cluster)")
    out: Annotated[str | None, Place()] = Field(
        default=None, min_length=1, description="new folder to write (encode, export; cluster: null writes nothing)"
    )
    batch: int = Field(default=64, ge=1, description="texts per pass of the model")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda where there is one")

    @model_validator(mode="after")
    def _check_mode(self) -> EmbedSpec:
        """Refuse a missing or second source, missing texts, and settings of another mode."""
        if (self.ckpt is None) == (self.dir is None):
            given = "neither" if self.ckpt is None else "both"
            raise ValueError(f"give either ckpt=RUN or dir=FOLDER ({given} given)")
        for name, modes in OF_MODE.items():
            if self.mode not in modes and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name}={getattr(self, name)} belongs to mode={' or '.join(modes)}, and this is mode={self.mode}"
                )
        if self.mode in ("encode", "export") and self.out is None:
            raise ValueError(f"out: a value is missing; mode={self.mode} writes out=FOLDER")
        if self.mode == "export" and self.ckpt is None:
            raise ValueError(f"dir={self.dir} is exported already; mode=export takes ckpt=RUN")
        for name in ("query", "text"):
            if (given := getattr(self, name)) is not None and not given.strip():
                raise ValueError(f"{name}={given!r} is blank; give a text")
        self._check_texts()
        return self

    def _check_texts(self) -> None:
        if self.mode == "similarity":
            is_pair = self.query is not None and self.text is not None
            if (self.query is None) != (self.text is None) or is_pair == (self.input is not None):
                raise ValueError("mode=similarity takes either query=TEXT text=TEXT, or input=FILE of pairs")
            return
        if self.mode != "export" and (self.input is None) == (self.data is None):
            given = "neither" if self.input is None else "both"
            raise ValueError(f"mode={self.mode} takes either input=FILE or data=stdlib_pairs ({given} given)")
        if self.mode == "search" and (self.query is None) == (self.queries is None):
            given = "neither" if self.query is None else "both"
            raise ValueError(f"mode=search takes either query=TEXT or queries=FILE ({given} given)")
