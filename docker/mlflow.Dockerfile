# MLflow's server at the version of its clients, with the drivers of PostgreSQL and S3.
FROM python:3.11.16-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b AS base
ENV PATH=/opt/mlflow/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1

FROM base AS dependencies
WORKDIR /locked
COPY lock.txt tools/setup_env.py ./
RUN python setup_env.py --list mlflow >mlflow.txt \
    && python -m venv /opt/mlflow \
    && pip install --disable-pip-version-check --no-cache-dir --no-deps --only-binary :all: --require-hashes \
        -r mlflow.txt

FROM base AS result
ARG VERSION=3.17.2
LABEL org.opencontainers.image.title="mlflow" \
      org.opencontainers.image.description="MLflow's tracking server for hpo" \
      org.opencontainers.image.version="${VERSION}"
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin mlflow
COPY --from=dependencies /opt/mlflow /opt/mlflow
COPY --chmod=0644 docker/mlflow_server.py /opt/mlflow_server.py
ENV HOME=/tmp
USER 10001:10001
WORKDIR /tmp
EXPOSE 5000
ENTRYPOINT ["python", "/opt/mlflow_server.py"]
CMD ["serve"]
