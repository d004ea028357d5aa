"""Adds the token of a claim, the attempt that obeyed a decision, and the longest silence of a study's workers."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("studies", sa.Column("lease_seconds", sa.Double(), nullable=False, server_default="30"))
    op.add_column("attempts", sa.Column("claim", sa.String(length=32), nullable=True))
    op.add_column("decisions", sa.Column("obeyed", sa.Integer(), nullable=True))
