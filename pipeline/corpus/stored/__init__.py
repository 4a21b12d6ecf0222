"""A corpus on disk, from the bottom up: each module imports only those named before it.

`gather` copies pieces of memory. `memory` says where the columns of a part are, and `parts` are the
Arrow files that have them. `directory` names the files of a corpus, and `manifest` lists them.
`log` says what is written before that. `writer` writes a corpus; `reader` reads its parts, and
`cache` fetches those of a bucket.
"""
