# metalion on CUDA. Build:  docker build -t metalion .
# Run:    docker run --gpus all --ipc=host -v $PWD/runs:/metalion/runs metalion python train.py
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-dev git make g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /metalion
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH DS_BUILD_OPS=0
# Requirements first: a change of the code does not install them again. torch before the rest, as on every machine.
COPY requirements.txt .
RUN python3 -m venv $VIRTUAL_ENV \
    && pip install --no-cache-dir "$(grep '^torch==' requirements.txt)" \
    && pip install --no-cache-dir -r requirements.txt
COPY . .
CMD ["python", "train.py", "--help"]
