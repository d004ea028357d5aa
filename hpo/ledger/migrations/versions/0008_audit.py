"""Adds the record of who did what. The studies that it names may be deleted."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("uid", sa.String(32), nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("study", sa.String(64), nullable=False),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("user", sa.String(250), nullable=False),
        sa.Column("role", sa.String(250), nullable=True),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("command", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
        sa.UniqueConstraint("uid", name=op.f("uq_audit_uid")),
    )
