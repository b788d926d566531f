# Image for GPU clusters. Build: docker build -t pivotrl . ; for pyxis: enroot import -o pivotrl.sqsh dockerd://pivotrl
# The base has the CUDA libraries, NCCL and a compiler; the packages are those of the extra `gpu` in pyproject.toml.
FROM nvcr.io/nvidia/pytorch:25.09-py3

# The base pins its own builds of torch and friends for pip; a virtual environment of our own stays clear of them.
ENV PIP_CONSTRAINT="" \
    PIP_NO_CACHE_DIR=1 \
    VIRTUAL_ENV=/opt/pivotrl/.venv \
    PATH=/opt/pivotrl/.venv/bin:$PATH

RUN groupadd --system pivotrl \
    && useradd --system --gid pivotrl --create-home pivotrl \
    && install -d -o pivotrl -g pivotrl /opt/pivotrl

USER pivotrl
WORKDIR /opt/pivotrl

# Packages first: this layer is built again only when they change.
COPY --chown=pivotrl:pivotrl pyproject.toml README.md LICENSE ./
RUN python3 -m venv .venv \
    && python3 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print('\n'.join(p['dependencies'] + p['optional-dependencies']['gpu'] + p['optional-dependencies']['wandb']))" > requirements.txt \
    && .venv/bin/pip install --requirement requirements.txt

COPY --chown=pivotrl:pivotrl conf conf
COPY --chown=pivotrl:pivotrl checkpoint_tools checkpoint_tools
COPY --chown=pivotrl:pivotrl launch launch
COPY --chown=pivotrl:pivotrl pivotrl pivotrl
RUN .venv/bin/pip install --no-deps . && pivotrl --version

CMD ["pivotrl", "--help"]
