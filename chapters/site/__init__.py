"""The course as web pages: python -m chapters site. player and browser also run in the reader's browser."""
