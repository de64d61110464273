# metalion on CUDA. Build:  docker build -t metalion .        (.ci/image builds and tries it)
# Run:    docker run --gpus all --ipc=host -v $PWD/runs:/metalion/runs metalion metalion train
# The user in the image has the id 1000. For another owner of runs/: docker build --build-arg UID=$(id -u) ...
# A tag may change. To build from one fixed base, pass its digest, which the second command prints:
#   docker build --build-arg BASE=nvidia/cuda@sha256:... -t metalion .
#   docker buildx imagetools inspect nvidia/cuda:13.0.1-devel-ubuntu24.04
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BASE}

RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-dev git make g++ \
    && rm -rf /var/lib/apt/lists/*
ARG UID=1000
RUN useradd --create-home --non-unique --uid ${UID} metalion && install -d -o metalion /metalion /metalion/runs /opt/venv
USER metalion
WORKDIR /metalion
ENV HOME=/home/metalion VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH DS_BUILD_OPS=0
# Requirements first: a change of the code does not install them again. The lock holds torch with CUDA.
COPY requirements.lock .
RUN python3 -m venv $VIRTUAL_ENV && pip install --no-cache-dir --require-hashes -r requirements.lock
COPY --chown=metalion pyproject.toml requirements.txt README.md LICENSE Makefile train.py eval.py ./
COPY --chown=metalion configs configs
COPY --chown=metalion data data
COPY --chown=metalion megatron_lite megatron_lite
COPY --chown=metalion models models
COPY --chown=metalion tools tools
RUN pip install --no-cache-dir --no-deps -e .
CMD ["metalion", "--help"]
