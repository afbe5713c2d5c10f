SELECT worker FROM cordons
