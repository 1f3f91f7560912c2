"""An OpenAI-compatible HTTP server around one engine.

request_schema, responses: the JSON of requests and answers. detokenizer: ids to text, token by
token, up to a stop string. engine_loop: the thread that runs the engine. app: the routes. metrics:
series for Prometheus. server: the process. page.html: the page in the browser.
"""
