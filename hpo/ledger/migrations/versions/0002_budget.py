"""Adds budgets of epochs and of time, and the time a study has used."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("studies", sa.Column("max_epochs", sa.Integer(), nullable=True))
    op.add_column("studies", sa.Column("max_seconds", sa.Double(), nullable=True))
    op.add_column("studies", sa.Column("seconds_used", sa.Double(), server_default="0", nullable=False))
