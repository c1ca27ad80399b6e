"""What may be skipped: a folder for each capability. The heart (the package's own files, core/, worker/) needs none."""
