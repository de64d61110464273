"""The `data` section of a configuration: text, tokenizer, blend, masking."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_lite.config.section import Section, Text


class TokenizerConfig(Section):
    """What turns text into token ids."""

    type: Literal["sentencepiece", "hf", "wordpiece", "bytes"] = Field(
        default="sentencepiece",
        description="sentencepiece: a `.model` file; hf: a Hugging Face `tokenizer.json`; wordpiece: a BERT "
        "`vocab.txt`; bytes: no file.",
    )
    path: Text | None = Field(
        default=None, description="The tokenizer's file. Empty with sentencepiece: trained on `data.corpus` and cached."
    )
    vocab_size: int = Field(
        default=4096,
        ge=264,
        description="Entries of a SentencePiece model trained here; a tokenizer from a file has its own.",
    )


class BlendConfig(Section):
    """How often each of several token files is taken: in proportion to (weight, tokens or documents)^(1 / temperature)."""

    by: Literal["tokens", "documents", "weights"] = Field(
        default="tokens", description="What the shares follow: what the files hold, or `weights`."
    )
    weights: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(
        default=None, description="One for each file of `data.train`, with `by: weights`; any positive numbers."
    )
    temperature: float = Field(default=1.0, gt=0, description="Above 1 evens the shares out, 1 leaves them.")


class MaskedConfig(Section):
    """Samples of a masked language model (`data.objective: masked`)."""

    rate: float = Field(default=0.30, gt=0, lt=1, description="Share of the tokens to be found, in training.")
    validation_rate: float = Field(default=0.15, gt=0, lt=1, description="The same in validation.")
    whole_word: bool = Field(default=False, description="Choose whole words instead of tokens.")
    layout: Literal["padded", "packed"] = Field(
        default="padded",
        description="padded: a document a row, longer ones in several; packed: rows cut from one stream of documents.",
    )


class DataConfig(Section):
    """The training and validation text: a raw `corpus`, or token files that were prepared (`train`)."""

    corpus: Text | tuple[Text, ...] | None = Field(
        default=None,
        description="Raw text, prepared and cached at the start: `stdlib` (the Python standard library), a file, folder, "
        "glob (.txt, .jsonl, .json, .parquet; plain, .gz or .zst), a saved Hugging Face data set or "
        "`hf:NAME[:CONFIGURATION][:SPLIT]`, or a list of them.",
    )
    train: Text | tuple[Text, ...] | None = Field(
        default=None,
        description="Prefix of a `.bin`/`.idx` pair of training tokens, without the extension, or a list of them; instead "
        "of `corpus`.",
    )
    blend: BlendConfig = Field(default=BlendConfig(), description=BlendConfig.__doc__)
    validation: Text | None = Field(
        default=None, description="Prefix of a pair of validation tokens; goes with `train`."
    )
    test: Text | None = Field(default=None, description="The same for the final test; goes with `train`.")
    text_key: Text = Field(default="text", description="Key of the text in JSON lines.")
    source_key: Text = Field(
        default="meta.pile_set_name",
        description="Where a record of `corpus` names its source, with dots into inner objects; the Pile's.",
    )
    validation_fraction: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="Share of the documents of `corpus` held out for validation, chosen by hash.",
    )
    objective: Literal["causal", "masked"] = Field(
        default="causal", description="causal: the next token; masked: masked tokens, for bidirectional mixers."
    )
    order: Literal["neox", "reshuffle"] = Field(
        default="neox",
        description="neox: GPT-NeoX's order, one shuffle over all epochs; reshuffle: every epoch by itself, so that a "
        "longer run begins like the shorter one.",
    )
    reset_at_documents: bool = Field(
        default=False,
        description="Nothing crosses from one document into the next: states and convolutions start anew.",
    )
    mask_boundaries: bool = Field(
        default=False,
        description="The first token of a document is not predicted from the end of the one before it (GPT-NeoX's "
        "eod_mask_loss). Validation counts it.",
    )
    masked: MaskedConfig = Field(default=MaskedConfig(), description=MaskedConfig.__doc__)
    cache_directory: Text = Field(
        default="runs/cache", description="Folder of prepared corpora, tokenizers and sample indices."
    )
    tokenizer: TokenizerConfig = Field(default=TokenizerConfig(), description="What turns text into token ids.")

    @property
    def train_files(self) -> tuple[str, ...]:
        """`train` as a list."""
        return (self.train,) if isinstance(self.train, str) else self.train or ()

    @property
    def predicted_fraction(self) -> float:
        """Expected share of a training batch's tokens at which a token is to be predicted."""
        return self.masked.rate if self.objective == "masked" else 1.0
