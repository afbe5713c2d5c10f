// An OpenID Connect provider whose sign-in page accepts every name; its groups are those of the name in GROUPS.
// node oidc_provider.js PORT REDIRECT_URI GROUPS
import { Provider } from "oidc-provider";

const [port, redirectUri, groups] = process.argv.slice(2);
const known = JSON.parse(groups);
const client = {
  client_id: "tierlane",
  client_secret: "a secret: of + tests",
  redirect_uris: [redirectUri],
  grant_types: ["authorization_code"],
  response_types: ["code"],
};
const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: [client],
  claims: { openid: ["sub"], email: ["email", "email_verified"], groups: ["groups"] },
  scopes: ["openid", "email", "groups"],
  pkce: { required: () => true },
  features: { devInteractions: { enabled: true } },
  findAccount: (_, id) => ({
    accountId: id,
    claims: () => ({ sub: id, email: `${id}@example.com`, email_verified: true, groups: known[id] ?? [] }),
  }),
});
provider.listen(Number(port), "127.0.0.1");
