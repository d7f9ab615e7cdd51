-- The few formulas that many questions share. Another engine defines the same names in its own dialect.

-- k of n as a number; NULL, never NaN, when there were none.
create macro ratio(k, n) as k / nullif(n, 0);

-- Wilson score interval of k of n at 95 % (E. B. Wilson, JASA 22, 1927), as sloscope.definitions.wilson has it.
create macro wilson_low(k, n) as case
    -- exact where rounding would leave 5e-17
    when n > 0 and k = 0 then 0e0
    when n > 0
        then greatest(
            0e0,
            (k + pow(1.959963984540054e0, 2) / 2) / (n + pow(1.959963984540054e0, 2))
            - 1.959963984540054e0 / (n + pow(1.959963984540054e0, 2))
            * sqrt(k * 1e0 * (n - k) / n + pow(1.959963984540054e0, 2) / 4)
        )
end;

create macro wilson_high(k, n) as case
    when n > 0 and k = n then 1e0
    when n > 0
        then least(
            1e0,
            (k + pow(1.959963984540054e0, 2) / 2) / (n + pow(1.959963984540054e0, 2))
            + 1.959963984540054e0 / (n + pow(1.959963984540054e0, 2))
            * sqrt(k * 1e0 * (n - k) / n + pow(1.959963984540054e0, 2) / 4)
        )
end;
