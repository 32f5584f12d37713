"""vLLM behind the Engine port. docs/vllm.md has the picture.

args      our configuration as vLLM's command line (pure)
support   which versions were tried, and whether an environment has what the adapter needs
child     vLLM's server as a child process, with the plugin on its path; `guard` is between them and leaves nothing of it behind
api       its HTTP routes
engine    the Engine port over them; `flights` are its requests, `updates` its policy versions, `told` what a stream has said
canary    what is compared after an update; `reference` computes what must come out
rows      routing rows of finished requests
scrape    its Prometheus metrics as ours
app       the routes of an engine server, for the pool
plugin    runs in vLLM's processes: loads published weights, records what the experts do; `middleware` is in its server, and says which
          version sampled which token
"""
