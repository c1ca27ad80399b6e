"""The checks that several places share: values and names that a person passes, when callers may call, a sandbox."""
