"""Where a study's files lie: the home, buckets, artifacts, and what removes them."""
