-- The same rules as ledger/catalog/api_key.py; tests hold the two together.

-- CRC-32 (IEEE 802.3, as zlib has it): PostgreSQL has a function for it only from version 18 on.
CREATE FUNCTION tierlane_crc32(bytes bytea) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE STRICT AS $$
DECLARE
    crc bigint := 4294967295;
BEGIN
    FOR i IN 0 .. octet_length(bytes) - 1 LOOP
        crc := crc # get_byte(bytes, i);
        FOR bit IN 1 .. 8 LOOP
            crc := (crc >> 1) # (CASE WHEN crc & 1 = 1 THEN 3988292384 ELSE 0 END);
        END LOOP;
    END LOOP;
    RETURN crc # 4294967295;
END
$$;
COMMENT ON FUNCTION tierlane_crc32(bytea) IS 'CRC-32 of some bytes.';

-- The last `digits` digits of a number in the notation that the alphabet's length gives.
CREATE FUNCTION tierlane_digits(value numeric, digits integer, alphabet text) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT AS $$
DECLARE
    base integer := length(alphabet);
    written text := '';
BEGIN
    FOR i IN 1 .. digits LOOP
        written := substr(alphabet, mod(value, base)::integer + 1, 1) || written;
        value := div(value, base);
    END LOOP;
    RETURN written;
END
$$;
COMMENT ON FUNCTION tierlane_digits(numeric, integer, text) IS 'A number as text of fixed length.';

-- A number of 256 random bits: UUIDs are made from the server's strong random source, 122 bits each.
CREATE FUNCTION tierlane_random_number() RETURNS numeric
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    bytes bytea := sha256(
        uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())
    );
    value numeric := 0;
BEGIN
    FOR i IN 0 .. 31 LOOP
        value := value * 256 + get_byte(bytes, i);
    END LOOP;
    RETURN value;
END
$$;
COMMENT ON FUNCTION tierlane_random_number() IS 'A random number below 2^256.';

-- Issues a key to a customer and returns it; it is shown this once, only a hash of its secret is kept.
CREATE FUNCTION issue_api_key(customer text, name text, expires_at timestamptz DEFAULT NULL) RETURNS text
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    owner_id uuid;
    key_id text := tierlane_digits(tierlane_random_number(), 12, '0123456789abcdefghijklmnopqrstuvwxyz');
    base62 text := '0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz';
    secret text := tierlane_digits(tierlane_random_number(), 28, base62);
    body text := 'tl_' || key_id || '_' || secret;
BEGIN
    SELECT c.id INTO owner_id FROM customers AS c WHERE c.name = issue_api_key.customer;
    IF owner_id IS NULL THEN
        RAISE EXCEPTION 'there is no customer named %', coalesce(quote_literal(customer), 'NULL')
            USING ERRCODE = 'no_data_found', HINT = 'SELECT name FROM customers lists those that exist.';
    END IF;
    INSERT INTO api_keys (id, customer_id, name, secret_hash, expires_at)
    VALUES (key_id, owner_id, issue_api_key.name, sha256(convert_to(secret, 'UTF8')), issue_api_key.expires_at);
    RETURN body || tierlane_digits(tierlane_crc32(convert_to(body, 'UTF8')), 6, base62);
END
$$;
COMMENT ON FUNCTION issue_api_key(text, text, timestamptz) IS
    'Issues an API key to the named customer and returns it; it is shown this once.';
