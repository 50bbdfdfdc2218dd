# Image for machines with GPUs (driver 580 or newer, NVIDIA Container Toolkit), of the versions in requirements/cuda.lock.txt:
#   docker build --tag rl-plugins .
#   docker run --rm --gpus all --shm-size=16g --volume /shared:/shared rl-plugins rl-plugins doctor
# Without --shm-size, /dev/shm has 64 MiB, and NCCL, vLLM and Ray's object store need more.
FROM python:3.11-slim-bookworm

# Triton, FlashInfer and DeepSpeed compile kernels at their first use. The probes of KubeRay call wget.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make wget \
    && rm -rf /var/lib/apt/lists/*

# The driver's libraries and nvidia-smi come from the machine; some clouds mount them in /usr/local/nvidia.
ENV PATH=/usr/local/nvidia/bin:$PATH \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib64 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/rl-plugins
COPY requirements/cuda.lock.txt requirements/
RUN grep '^pip==' requirements/cuda.lock.txt | pip install --require-hashes --requirement /dev/stdin \
    && pip install --no-deps --require-hashes --build-constraint requirements/cuda.lock.txt \
        --requirement requirements/cuda.lock.txt
COPY . .
RUN pip install --no-deps --no-build-isolation .

# Files in mounted folders belong to this user: docker build --build-arg USER_ID=$(id -u)
ARG USER_ID=1000
RUN useradd --create-home --uid "$USER_ID" trainer
USER trainer
WORKDIR /home/trainer

HEALTHCHECK --interval=5m --timeout=1m --start-period=1m CMD ["rl-plugins", "doctor"]
CMD ["rl-plugins", "doctor"]
