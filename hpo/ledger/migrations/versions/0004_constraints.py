"""Adds the excess of a trial over the bounds of its study's constraints."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("trials", sa.Column("violations", sa.JSON(), nullable=True))
