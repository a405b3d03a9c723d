"""templar: strangers train one large language model together over the open internet."""
