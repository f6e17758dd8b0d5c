"""What several test layers share: trees, blobs, mounts. Nothing here imports product state."""
