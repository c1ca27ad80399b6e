"""The course as web pages: python -m chapters site. player, pictures and browser also run in the reader's browser."""
