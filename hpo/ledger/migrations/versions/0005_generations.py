"""Adds the checkpoint of another trial that a trial begins from, for the generations of a population."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("trials", sa.Column("start", sa.Text(), nullable=True))
    op.add_column("trials", sa.Column("from_epoch", sa.Integer(), nullable=False, server_default="0"))
