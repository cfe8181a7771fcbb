"""Rows of any source: files, tars, folders and datasets, on this machine, on S3 or from the Hugging Face hub.

``read.source_rows`` gives each row as a mapping of columns with its file and number, or an error in its place. Nothing
is decoded, guessed or executed.
"""
