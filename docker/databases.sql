-- Run once by PostgreSQL's image, on an empty volume, beside the database that POSTGRES_DB names.
CREATE DATABASE mlflow;
CREATE DATABASE mlflow_users;
