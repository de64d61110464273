# make train    set up everything, train the default model, report the result
# make test     set up everything, run style checks, type checks and tests
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-$(shell cksum < requirements.txt | cut -d' ' -f1)

.PHONY: help setup lock train test test-huggingface lint data-pile-sample data-c4-sample data-text-sample data-text-corpus clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(STAMP)  ## create .venv and install requirements.txt, unless both are up to date

# The name of the stamp holds the checksum of requirements.txt, so another time of that file installs nothing again.
# torch comes first: if the index offers a CPU build, later packages then do not install CUDA. DeepSpeed compiles no operators.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	@echo "installing requirements.txt into $(VENV): about 2 GB, two minutes on a fast network"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.txt)"
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@rm -f $(VENV)/.installed-*; touch $@

lock:  ## write requirements.lock, every package with its hashes (needs uv)
	uv pip compile requirements.txt --universal --python-version 3.11 --generate-hashes --no-annotate --no-emit-index-url \
	  --no-emit-find-links --custom-compile-command "make lock" --quiet --output-file requirements.lock

train: setup  ## train the default model on this machine (about 8 minutes on 2 cores, installation included) and report the result
	$(BIN)/python train.py

# 200 processes start: without cached bytecode, which some environments switch off, the tests take 15 % longer.
# One more process than cores, because some tests wait. nproc prints OMP_NUM_THREADS if it is set.
PYTEST = PYTEST_XDIST_AUTO_NUM_WORKERS=$$(($$(env -u OMP_NUM_THREADS nproc) + 1)) OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

test: setup lint  ## style checks, type checks and all tests; on a GPU machine, those of a GPU in processes of their own
	@set -e; if nvidia-smi --list-gpus > /dev/null 2>&1; then set -x; $(PYTEST) -m gpu; $(PYTEST) -m "not gpu"; else set -x; $(PYTEST); fi

test-huggingface: setup  ## test exports in environments with only torch and transformers (built once, 3 GB in ~/.cache/metalion)
	$(BIN)/python tests/tools/conversion/environments.py
	OMP_NUM_THREADS=1 METALION_COMPILE=1 $(BIN)/python -m pytest tests/tools/conversion/test_environments.py

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# SAMPLES holds pile_sample/train/*.jsonl.zst, pile_sample/val.jsonl.zst, c4_sample/c4-train.*.json.gz,
# c4_sample/c4-validation.*.json.gz and tokenizers/bert-base-uncased/vocab.txt: any files in the formats of the Pile and C4.
SAMPLES ?= samples
CORPUS = $(SAMPLES)/text_corpus
CORPUS_TRAIN = $(if $(PARTS),$(PARTS:%=$(CORPUS)/train/%.jsonl.zst),$(CORPUS)/train)
TEXT_SAMPLE = $(SAMPLES)/pile_sample/train $(SAMPLES)/pile_sample/val.jsonl.zst '$(SAMPLES)/c4_sample/*.json.gz'
PREPROCESS = $(BIN)/python -m tools.preprocess_data --append-eod

data-pile-sample: setup  ## tokenizer and token files of a sample of the Pile: make data-pile-sample SAMPLES=FOLDER
	$(BIN)/python -m tools.train_tokenizer --input $(SAMPLES)/pile_sample/train --vocab-size 4096 \
	  --sample-characters 8000000 --output corpora/pile_sample/tokenizer.model
	$(PREPROCESS) --input $(SAMPLES)/pile_sample/train --tokenizer-type sentencepiece \
	  --vocab-file corpora/pile_sample/tokenizer.model --deduplicate --output-prefix corpora/pile_sample/train
	$(PREPROCESS) --input $(SAMPLES)/pile_sample/val.jsonl.zst --tokenizer-type sentencepiece \
	  --vocab-file corpora/pile_sample/tokenizer.model --output-prefix corpora/pile_sample/validation
	$(BIN)/python -m tools.inspect_data corpora/pile_sample/train_text_document --histogram corpora/pile_sample/lengths.png
	@echo "now: $(BIN)/python train.py configs/pile_sample.yml"

data-c4-sample: setup  ## token files of a sample of C4 in BERT's vocabulary: make data-c4-sample SAMPLES=FOLDER
	mkdir -p corpora/c4_sample
	cp $(SAMPLES)/tokenizers/bert-base-uncased/vocab.txt corpora/c4_sample/vocab.txt
	$(PREPROCESS) --input '$(SAMPLES)/c4_sample/c4-train.*.json.gz' --tokenizer-type wordpiece \
	  --vocab-file corpora/c4_sample/vocab.txt --output-prefix corpora/c4_sample/train
	$(PREPROCESS) --input '$(SAMPLES)/c4_sample/c4-validation.*.json.gz' --tokenizer-type wordpiece \
	  --vocab-file corpora/c4_sample/vocab.txt --output-prefix corpora/c4_sample/validation
	@echo "now: $(BIN)/python train.py configs/c4_sample.yml"

data-text-sample: setup  ## token files of both samples together, causal and masked: make data-text-sample SAMPLES=FOLDER
	mkdir -p corpora/text_sample
	cp $(SAMPLES)/tokenizers/bert-base-uncased/vocab.txt corpora/text_sample/vocab.txt
	$(BIN)/python -m tools.train_tokenizer --input $(SAMPLES)/pile_sample/train --vocab-size 4096 \
	  --sample-characters 8000000 --output corpora/text_sample/tokenizer.model
	$(PREPROCESS) --input $(TEXT_SAMPLE) --deduplicate --split 85,15 --tokenizer-type sentencepiece \
	  --vocab-file corpora/text_sample/tokenizer.model --output-prefix corpora/text_sample/text
	$(PREPROCESS) --input $(TEXT_SAMPLE) --deduplicate --split 85,15 --tokenizer-type wordpiece \
	  --vocab-file corpora/text_sample/vocab.txt --output-prefix corpora/text_sample/mlm
	@echo "now: $(BIN)/python -m tools.compare configs/experiments/compare_lm.yml   # or compare_masked.yml"

data-text-corpus: setup  ## token files of the text corpus, or of parts of it: make data-text-corpus SAMPLES=FOLDER PARTS="00 01"
	mkdir -p corpora/text_corpus
	$(BIN)/python -m tools.train_tokenizer --input $(CORPUS_TRAIN) --vocab-size 8192 --output corpora/text_corpus/tokenizer.model
	for part in "train $(CORPUS_TRAIN)" "validation $(CORPUS)/validation.jsonl.zst" "shift $(CORPUS)/shift.jsonl.zst"; do \
	  $(PREPROCESS) --input $${part#* } --tokenizer-type sentencepiece --data-card \
	    --vocab-file corpora/text_corpus/tokenizer.model --output-prefix corpora/text_corpus/$${part%% *} || exit 1; \
	done
	@echo "now: $(BIN)/python -m tools.compare configs/experiments/ladder_small.yml   # or ladder.yml, with all parts"

clean:  ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
