"""Adds tags of trials and of studies."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tags",
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(250), nullable=False),
        sa.Column("value", sa.Text(), nullable=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"], name=op.f("fk_tags_study_id")),
        sa.PrimaryKeyConstraint("study_id", "number", "key", name=op.f("pk_tags")),
    )
