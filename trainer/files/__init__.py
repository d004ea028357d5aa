"""Files that survive a kill, and where they may lie: durable writes, S3, scratch directories, tables."""
