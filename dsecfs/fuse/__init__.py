"""The FUSE file systems of a node: blobs as files, composed trees, and their supervisors."""
