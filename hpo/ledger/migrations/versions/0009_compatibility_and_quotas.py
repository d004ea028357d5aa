"""Adds the oldest schema that may use the ledger, the schema of each process, quotas, and what backups hold."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "compatibility",
        sa.Column("schema", sa.String(32), nullable=False),
        sa.Column("release", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("schema", name=op.f("pk_compatibility")),
    )
    op.create_table(
        "quotas",
        sa.Column("person", sa.String(250), nullable=False),
        sa.Column("trials", sa.Integer(), nullable=True),
        sa.Column("bytes", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("person", name=op.f("pk_quotas")),
    )
    for table in ("leases", "workers"):
        op.add_column(table, sa.Column("schema", sa.String(32), nullable=True))
    op.add_column("checkpoints", sa.Column("held_until", sa.Double, nullable=True))
