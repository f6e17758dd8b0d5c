"""Where layers live: one small interface over a directory, 3FS and S3."""
