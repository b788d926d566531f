# Image for GPU clusters. Build: docker build -t pivotrl . ; for pyxis: enroot import -o pivotrl.sqsh dockerd://pivotrl
# The base has CUDA 13, NCCL and a compiler; the packages and their versions are those of `make install-gpu`.
FROM nvcr.io/nvidia/pytorch:25.09-py3 AS pivotrl

# The base pins its own builds of torch and friends for pip; a virtual environment of our own stays clear of them.
ENV PIP_CONSTRAINT="" \
    PIP_NO_CACHE_DIR=1 \
    VIRTUAL_ENV=/opt/pivotrl/.venv \
    PATH=/opt/pivotrl/.venv/bin:$PATH

RUN groupadd --gid 10001 pivotrl \
    && useradd --uid 10001 --gid pivotrl --create-home pivotrl \
    && install -d -o pivotrl -g pivotrl /opt/pivotrl

USER 10001:10001
WORKDIR /opt/pivotrl

# Packages first: this layer is built again only when they change.
COPY --chown=pivotrl:pivotrl Makefile pyproject.toml README.md LICENSE ./
COPY --chown=pivotrl:pivotrl requirements requirements
RUN make .venv/.packages-gpu

COPY --chown=pivotrl:pivotrl conf conf
COPY --chown=pivotrl:pivotrl checkpoint_tools checkpoint_tools
COPY --chown=pivotrl:pivotrl launch launch
COPY --chown=pivotrl:pivotrl slurm slurm
COPY --chown=pivotrl:pivotrl pivotrl pivotrl
RUN make install-gpu && pivotrl --version

CMD ["pivotrl", "--help"]

# docker build --target nemo: beside it /opt/pivotrl/.nemo, whose nemo-toolkit imports a model once (docs/checkpoints.md).
FROM pivotrl AS nemo
RUN python3.12 -m venv .nemo \
    && .nemo/bin/pip install 'nemo-toolkit[nlp]==2.7.3'

# The last stage is what `docker build` makes without --target.
FROM pivotrl
