"""One model for many people: the engine behind OpenAI's HTTP interface.

asked, replies: what clients send, and what they get. words: ids to text as they come, up to a stop
string. runner: the thread that owns the engine. app: the routes. metrics: what Prometheus reads.
server: the process. page.html: what a person sees.
"""
