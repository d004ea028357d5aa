"""Groups queries by their user: the driver, the mirror, the pages, the verifier and others."""
