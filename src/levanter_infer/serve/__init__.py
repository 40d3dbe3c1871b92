"""`levanter-infer serve`: an HTTP server with OpenAI's completion endpoints over `AsyncEngine`."""
