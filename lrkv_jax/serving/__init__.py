"""One model for many people: the engine behind OpenAI's HTTP interface.

request_schema, responses: what clients send, and what they get. detokenizer: ids to text as they
come, up to a stop string. engine_loop: the thread that owns the engine. app: the routes. metrics:
what Prometheus reads. server: the process. page.html: what a person sees.
"""
