"""The `data` section of a configuration: text, tokenizer, blend, masking, images."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_lite.config.image_schema import ImagesConfig
from megatron_lite.config.section import Section, Text


class TokenizerConfig(Section):
    """The tokenizer, which converts text to token ids."""

    type: Literal["sentencepiece", "hf", "gpt2", "wordpiece", "bytes"] = Field(
        default="sentencepiece",
        description="sentencepiece: a `.model` file; hf: a Hugging Face `tokenizer.json`; gpt2: GPT-2's `vocab.json` with its "
        "merges beside it (`gpt2-vocab.json` and `gpt2-merges.txt`); wordpiece: a BERT `vocab.txt`; bytes: no file.",
    )
    path: Text | None = Field(
        default=None,
        description="File of the tokenizer. null with sentencepiece: a model is trained on `data.corpus` and cached.",
    )
    vocab_size: int = Field(
        default=4096,
        ge=264,
        description="Entries of a SentencePiece model trained here. A tokenizer from a file has its own size.",
    )


class BlendConfig(Section):
    """Sampling ratio of several token files: in proportion to (weight, tokens or documents)^(1 / temperature)."""

    by: Literal["tokens", "documents", "weights"] = Field(
        default="tokens", description="Ratio by number of tokens, by number of documents, or by `weights`."
    )
    weights: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(
        default=None, description="One positive number per file of `data.train`; requires `by: weights`."
    )
    temperature: float = Field(default=1.0, gt=0, description="1 keeps the ratios; above 1 makes them more even.")
    min_tokens: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None,
        description="One number per file of `data.train`: documents with fewer tokens are left out. To raise the share of long "
        "documents, name a file twice: `train: [web, web]`, `blend: {by: weights, weights: [3, 1], min_tokens: [0, 8192]}`.",
    )


class MaskedConfig(Section):
    """Samples of a masked language model (`data.objective: masked`)."""

    rate: float = Field(default=0.30, gt=0, lt=1, description="Fraction of the tokens to be predicted, in training.")
    validation_rate: float = Field(
        default=0.15, gt=0, lt=1, description="Fraction of the tokens to be predicted, in validation."
    )
    whole_word: bool = Field(default=False, description="Mask whole words instead of single tokens.")
    layout: Literal["padded", "packed"] = Field(
        default="padded",
        description="padded: one document per row, long documents in several rows; packed: rows cut from one stream"
        " of documents.",
    )


class DataConfig(Section):
    """Training and validation text: a raw `corpus`, or prepared token files (`train`)."""

    corpus: Text | tuple[Text, ...] | None = Field(
        default=None,
        description="Raw text, tokenised and cached at the start: `stdlib` (the Python standard library), a file, a folder, "
        "a glob (.txt, .jsonl, .json, .parquet; plain, .gz or .zst), a saved Hugging Face data set or "
        "`hf:NAME[:CONFIGURATION][:SPLIT]`, or a list of them.",
    )
    train: Text | tuple[Text, ...] | None = Field(
        default=None,
        description="Prefix of a `.bin`/`.idx` pair of training tokens, without the extension, or a list of prefixes. Excludes "
        "`corpus`.",
    )
    blend: BlendConfig = Field(default=BlendConfig(), description=BlendConfig.__doc__)
    validation: Text | None = Field(
        default=None, description="Prefix of a `.bin`/`.idx` pair of validation tokens; requires `train`."
    )
    test: Text | None = Field(
        default=None, description="Prefix of a `.bin`/`.idx` pair for the final test; requires `train`."
    )
    text_key: Text = Field(default="text", description="Key of the text in JSON lines, or column in parquet.")
    source_key: Text = Field(
        default="meta.pile_set_name",
        description="Key of the source of a record of `corpus`; dots address inner objects. Default: the key of the Pile.",
    )
    validation_fraction: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="Fraction of the documents of `corpus` held out for validation, selected by hash.",
    )
    objective: Literal["causal", "masked", "classification"] = Field(
        default="causal",
        description="causal: predict the next token; masked: predict masked tokens, with bidirectional mixers; classification: "
        "predict the class of images (`data.images`).",
    )
    order: Literal["neox", "reshuffle"] = Field(
        default="neox",
        description="Order of the samples. neox: one shuffle over all epochs, as GPT-NeoX; reshuffle: one shuffle per epoch, "
        "so that a longer run begins with the samples of a shorter one.",
    )
    packing: Literal["stream", "best_fit"] = Field(
        default="stream",
        description="How documents fill samples. stream: samples are cut from one stream of documents; best_fit (requires "
        "`order: reshuffle`): documents stay whole, only those longer than a sample are cut, and samples end with padding.",
    )
    reset_at_documents: bool = Field(
        default=False,
        description="Reset recurrent states, convolutions and attention at document boundaries.",
    )
    mask_boundaries: bool = Field(
        default=False,
        description="Exclude the first token of each document from the training loss (GPT-NeoX's eod_mask_loss). "
        "Validation includes it.",
    )
    masked: MaskedConfig = Field(default=MaskedConfig(), description=MaskedConfig.__doc__)
    images: ImagesConfig = Field(default=ImagesConfig(), description=ImagesConfig.__doc__)
    cache_directory: Text = Field(
        default="runs/cache", description="Folder of cached corpora, tokenizers and sample indices."
    )
    tokenizer: TokenizerConfig = Field(default=TokenizerConfig(), description=TokenizerConfig.__doc__)

    @property
    def train_files(self) -> tuple[str, ...]:
        """Return `train` as a tuple of prefixes."""
        return (self.train,) if isinstance(self.train, str) else self.train or ()

    @property
    def predicted_fraction(self) -> float:
        """Return the expected fraction of the positions of a training batch that have a label."""
        return self.masked.rate if self.objective == "masked" else 1.0
