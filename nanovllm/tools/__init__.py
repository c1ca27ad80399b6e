"""Beside the engine: these modules import it and are never imported by it."""
