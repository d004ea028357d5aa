-- PostgreSQL's image runs this once, on an empty volume, as the superuser. Ledger and MLflow get a role of their own each,
-- which owns its databases, is not a superuser, and cannot connect to the other's.
\set hpo_password `cat "$HPO_DATABASE_PASSWORD_FILE"`
\set mlflow_password `cat "$MLFLOW_DATABASE_PASSWORD_FILE"`

CREATE ROLE hpo LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION PASSWORD :'hpo_password';
CREATE ROLE mlflow LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION PASSWORD :'mlflow_password';

CREATE DATABASE hpo OWNER hpo;
CREATE DATABASE mlflow OWNER mlflow;
CREATE DATABASE mlflow_users OWNER mlflow;

REVOKE ALL ON DATABASE hpo, mlflow, mlflow_users, postgres, template1 FROM PUBLIC;
