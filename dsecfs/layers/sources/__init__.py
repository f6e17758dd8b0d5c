"""Sources: foreign bytes (tar, OCI image, directory, overlay upper) become a tree and data.

A source reads untrusted input once, front to back where it can, sends file data to a
`base.DataSink` and returns a `base.SourceTree`. It never unpacks to disk, and knows nothing
of chunks, stores or EROFS.
"""
