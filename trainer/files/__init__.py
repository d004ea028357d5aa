"""Writes files that survive a kill: durable writes, S3, scratch directories; and reads tables."""
