"""Configures Alembic with the connection from `hpo.ledger.migrations.upgrade`."""

from alembic import context

from hpo.ledger.database.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, transactional_ddl=True)
context.run_migrations()
