"""The course as web pages: python -m chapters site."""
